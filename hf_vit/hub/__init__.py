"""Sharing: card, package, push, verify, Space."""
