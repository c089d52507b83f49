"""The pages that links in messages lead to, and the records that their buttons write."""
