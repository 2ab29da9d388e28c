"""HTTP below Django: connections and their deadlines, request bodies, and the threads that run requests."""
