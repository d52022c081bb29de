"""Read conversations, render them with a chat template, and pack them into rows."""
