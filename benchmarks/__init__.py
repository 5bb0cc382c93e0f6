"""What is measured around the library; `tightrope bench` itself is in `tightrope.workbench`."""
