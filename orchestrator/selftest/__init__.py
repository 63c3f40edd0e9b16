"""The self-test: defects that are planted in an engine, and what the product says of each."""
