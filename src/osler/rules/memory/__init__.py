"""What keeps memory: graphs that nobody needs, and containers that only grow."""
