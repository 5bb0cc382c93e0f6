"""What brings this library into others: one package for each, which imports it only when called."""
