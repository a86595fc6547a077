"""The first and last stages of the ensemble."""
