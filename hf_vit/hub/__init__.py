"""Sharing a finished run on the Hub: its card, the files to push, the push itself, the check afterwards, and a Space."""

from hf_vit.hub.verification import verify


__all__ = ["verify"]
