"""The Accelerator API, version 2, as its clients know it. One module per resource; `routes` lists them."""
