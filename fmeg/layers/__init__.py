"""One file per layer: `<name>_specs(cfg)` beside the pure function `<name>(params, x, ...)`.

Letters in names of arrays, one meaning each: B batch, T query positions, S key positions, D model width, N query heads,
K key/value heads, G = N / K, H head dimension, R rotated half, F MLP width, V vocabulary, L layers. Every layer takes `ctx`,
the mesh that it runs on (None on a single device), and communicates by `reshard` alone.
"""
