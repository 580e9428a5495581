"""waitress-serve examples.frameworks.django_orders:application"""

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path

from flask_runonce import RunOnceMiddleware


def order(request: HttpRequest, item: str) -> JsonResponse:
    return JsonResponse({"ordered": item, "note": request.body.decode()}, status=201)


urlpatterns = [path("orders/<item>", order)]
settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"])
application = RunOnceMiddleware(get_wsgi_application())
