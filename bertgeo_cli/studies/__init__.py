"""Questions that alter the pass, follow gradients, read a head of the checkpoint or show single steps: one a file."""
