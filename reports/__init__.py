"""Renders one verdict document as a comment, a page or plain text."""
