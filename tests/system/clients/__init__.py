"""The programs that call an Accelerator service, unchanged, against Keystone and the whole product."""
