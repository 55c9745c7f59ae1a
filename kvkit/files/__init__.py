"""What kvkit writes to disk: .npz files, and files that are replaced in one step."""
