"""SIMD micro-kernels, generated for the host by LLVM."""
