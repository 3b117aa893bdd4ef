"""An index in Milvus: a server, a cluster, or a file of milvus-lite."""
