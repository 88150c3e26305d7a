"""A state as a manifest and raw bytes: conversion, snapshots, and the memory that receives it. No I/O."""
