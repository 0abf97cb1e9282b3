"""The stages of the GPU check. Free of torch, for the command that starts them."""

# In the order in which they run. Every one is a module of this package with a function `run`.
STAGES = (
    "environment",
    "roofs",
    "kernels",
    "parity",
    "overlap",
    "backends",
    "graphs",
    "decode",
    "embedding",
    "serving",
)
