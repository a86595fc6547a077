"""The generator in process, on a scripted vLLM and, where it is installed, on vLLM itself."""
