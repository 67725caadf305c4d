"""Chats: rows of files or of the Hub become conversations, a template makes text of these, and batches have them."""
