"""Tools of a chat request: what is offered to the model."""

from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.generation_schemas import ChatRequest

MAX_TOOLS = 512


def check_tools(body: ChatRequest) -> None:
    """Checks the tools of a request and how they may be used.

    Raises:
        ApiError: 400, naming the field.
    """
    tools, choice = body.tools or [], body.tool_choice
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"'tools' has {len(tools)} items; at most {MAX_TOOLS}.", "tools")
    for i, tool in enumerate(tools):
        _check_tool(tool, f"tools[{i}]")
    if choice not in (None, "none", "auto"):
        message = "'tool_choice': only 'auto' and 'none' are supported."
        raise bad_request(message, "tool_choice")
    form = body.response_format
    if offers_tools(body) and form is not None and form.type != "text":
        message = "'response_format' leaves no room for 'tools'; send 'tool_choice': 'none'."
        raise bad_request(message, "response_format")


def offers_tools(body: ChatRequest) -> bool:
    """Whether the model may call tools."""
    return bool(body.tools) and body.tool_choice != "none"


def _check_tool(tool: dict[str, object], place: str) -> None:
    if tool.get("type", "function") != "function":
        raise bad_request(f"'{place}.type': only 'function' is supported.", f"{place}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"'{place}.function' must be an object.", f"{place}.function")
    name = function.get("name")
    if not (isinstance(name, str) and name):
        field = f"{place}.function.name"
        raise bad_request(f"'{field}' must be a text that is not empty.", field)
    if not isinstance(function.get("parameters", {}), dict | None):
        field = f"{place}.function.parameters"
        raise bad_request(f"'{field}' must be an object.", field)
