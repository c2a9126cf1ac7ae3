"""The laboratory: real training over slow links, measured."""
