"""How fast the engines are, beside each other in one run: see `terra benchmark`."""
