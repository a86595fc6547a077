"""What the demo model has read about: one module for each subject."""
