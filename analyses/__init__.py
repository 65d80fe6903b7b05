"""The science: recorded tensors in, numbers out. One question, one file; the folder is the registry."""
