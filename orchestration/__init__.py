"""The control plane: who takes part, what is summed where and in which order. Decides; never touches tensor bytes.

`scheduler` is the process that decides by `job`, `membership` a node's side of it; `messages` is what they say. Imports
the standard library, pyzmq and msgspec only.
"""
