"""The phrase pool on a device, and what a draft round starts from."""
