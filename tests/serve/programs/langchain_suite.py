"""langchain's own tests of a chat model, which its integrations run: `python -m pytest langchain_suite.py`."""

import json
import os

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatModel(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        given = json.loads(os.environ["GIVEN"])
        return dict(**given, max_retries=0, max_tokens=200, seed=1, stream_usage=True)

    @property
    def has_tool_calling(self):
        return True

    @property
    def structured_output_kwargs(self):
        return {"method": "json_schema"}
