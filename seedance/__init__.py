"""Cost of GPU work: what runs on GPU hosts and laptops."""

__version__ = "0.1.0"
