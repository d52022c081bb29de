"""Conversations: read, rendered by a chat template, packed into rows."""
