"""The devices that plans are decided for: what each is, what it reaches, and how kernels are launched on it."""
