"""What tests share: small models, servers with and without a model, ways to compile kernels.

Tests import it at the top of their files: pyproject.toml puts tests/ on pytest's path. What one
test file alone uses stays in that file, and a program that one test starts lies beside the test.
"""
