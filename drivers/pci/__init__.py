"""PCI functions: find them, divide them, hand them over, and see who uses them."""
