"""OpenAI's files and batches: their routes.

A batch is a file with a request in each line. The server sends these requests to itself, and keeps the answers in two
files, one for those that succeeded.
"""

from __future__ import annotations

from parley.dialects.openai import object_lists
from parley.dialects.openai import uploaded_files as files
from parley.dialects.openai.batches import batch, batch_routes
from parley.dialects.route import QuerySchemas, Route

ID_SCHEMA = {"type": "string", "minLength": 1, "maxLength": object_lists.MAX_ID}
FILES_QUERY: QuerySchemas = {
    "limit": {"type": "integer", "minimum": 1, "maximum": files.MAX_LISTED},
    "order": {"type": "string", "enum": ["asc", "desc"]},
    "after": ID_SCHEMA,
    "purpose": {"type": "string", "minLength": 1, "maxLength": object_lists.MAX_ID},
}
BATCHES_QUERY: QuerySchemas = {
    "limit": {"type": "integer", "minimum": 1, "maximum": object_lists.MAX_LISTED},
    "after": ID_SCHEMA,
}
ROUTES = (
    Route("POST", "/v1/files", "stored", reader=files.upload_openai_file, reads_form=True),
    Route("GET", "/v1/files", "stored", reader=files.list_openai_files, reads_many=True, query=FILES_QUERY),
    Route("GET", "/v1/files/{id}", "stored", reader=files.answer_openai_file),
    Route("DELETE", "/v1/files/{id}", "stored", reader=files.delete_openai_file),
    Route(
        "GET",
        "/v1/files/{id}/content",
        "stored",
        reader=files.answer_openai_content,
        content_types=(files.CONTENT_TYPE.decode(),),
    ),
    Route(
        "POST",
        batch_routes.BATCHES_PATH,
        "stored",
        reader=batch_routes.create_openai_batch,
        batch_restorer=batch.restore_openai_batch,
    ),
    Route(
        "GET",
        batch_routes.BATCHES_PATH,
        "stored",
        reader=batch_routes.list_openai_batches,
        reads_many=True,
        query=BATCHES_QUERY,
    ),
    Route("GET", batch_routes.BATCHES_PATH + "/{id}", "stored", reader=batch_routes.answer_openai_batch),
    Route("POST", batch_routes.BATCHES_PATH + "/{id}/cancel", "stored", reader=batch_routes.cancel_openai_batch),
)
