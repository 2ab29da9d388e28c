"""Tests of the unchanged clients of the Accelerator service with a real Keystone and the whole product."""
