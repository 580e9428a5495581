"""waitress-serve examples.frameworks.falcon_orders:application"""

import falcon

from flask_runonce import RunOnceMiddleware


class Order:
    def on_post(self, request: falcon.Request, response: falcon.Response, item: str) -> None:
        response.media = {"ordered": item, "note": request.bounded_stream.read().decode()}
        response.status = falcon.HTTP_201


app = falcon.App()
app.add_route("/orders/{item}", Order())
application = RunOnceMiddleware(app)  # type: ignore[arg-type,unused-ignore]  # Falcon wants more of write()
