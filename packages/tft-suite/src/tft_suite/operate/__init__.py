"""`tft status` and `tft incidents`: what a lighthouse tells its operator, as text or JSON."""
