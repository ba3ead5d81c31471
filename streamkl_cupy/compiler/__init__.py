"""From a kernel's plan to a loaded kernel: one text, NVRTC, a folder of images, what is compiled ahead of time."""
