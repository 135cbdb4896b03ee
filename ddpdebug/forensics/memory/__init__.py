"""Memory forensics: reports of failed allocations, growth, and the holders of tensors."""
