"""Inputs of kernels, and kernels compiled for GPUs that are not here."""
