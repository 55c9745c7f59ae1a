"""SIMD micro-kernels, which LLVM compiles for the host's CPU."""
