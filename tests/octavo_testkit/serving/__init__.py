"""Engines and servers with and without a model, and clients that talk to them."""
