"""One module a group of commands; each adds its own to the application."""
