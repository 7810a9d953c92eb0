"""The user's data: files, images, labels and samples, fetched in batches."""
