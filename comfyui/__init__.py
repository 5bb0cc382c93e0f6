"""A custom node for ComfyUI that adds nothing to its menu: rotations on the CPU run on Tightrope's kernel.

Copy this folder to ComfyUI's custom_nodes/ and install `tightrope` in ComfyUI's environment.
"""

from tightrope.integrations.comfyui import register

NODE_CLASS_MAPPINGS: dict[str, type] = {}

register()
