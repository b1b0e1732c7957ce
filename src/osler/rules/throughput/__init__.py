"""What keeps the training waiting: loaders, and values that are pulled or written at every step."""
