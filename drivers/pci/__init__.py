"""Find PCI functions, divide them (SR-IOV), bind them to kernel drivers, and determine who uses them."""
