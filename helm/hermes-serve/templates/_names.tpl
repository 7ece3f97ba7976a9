{{/* Names, labels, images. Labels of Ray pods do not contain the chart's version, because a changed label would start a new Ray cluster. */}}

{{- define "hermes.selector" -}}
app.kubernetes.io/part-of: hermes-serve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "hermes.labels" -}}
{{ include "hermes.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The labels of one component: (list $ "redis") */}}
{{- define "hermes.component" -}}
{{ include "hermes.selector" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* The name by which the service owns its namespace in Redis. */}}
{{- define "hermes.service" -}}
{{ .Values.settings.service | default (printf "%s/%s" .Release.Namespace .Release.Name) }}
{{- end }}

{{/* The port of a URL. */}}
{{- define "hermes.portOf" -}}
{{- $url := urlParse . -}}
{{ regexFind "[0-9]+$" $url.host | default (ternary "443" "80" (eq $url.scheme "https")) }}
{{- end }}

{{/* An image reference: (list image defaultTag). A digest replaces the tag. */}}
{{- define "hermes.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (index . 1) }}
{{- end -}}
{{- end }}

{{- define "hermes.rayImage" -}}
{{ include "hermes.image" (list .Values.image .Chart.AppVersion) }}
{{- end }}

{{- define "hermes.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* How long ingresses and HAProxy must wait for streams, in seconds: the longest request plus a margin. */}}
{{- define "hermes.longestSeconds" -}}
{{ add (.Values.settings.ingress.max_request_timeout_s | ceil | int64) 100 }}
{{- end }}
