"""torchft's wire: its members on this lighthouse, and this project's replicas on torchft's lighthouse."""
