"""What experiments share: flags and errors, methods, the measuring loop, run folders, summaries."""
