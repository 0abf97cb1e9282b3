"""`rose bench`: the same load on a model in process, on a server, and on another, in turns."""
