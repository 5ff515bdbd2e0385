"""NVRTC and the driver API through ctypes."""
