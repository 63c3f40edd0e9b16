"""Pictures that read without script: bars and lines along a scale, every figure of them in words beside it."""
