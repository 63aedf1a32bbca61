"""Machines: profiles, the table of known ones, files, what stands for an unknown one."""
